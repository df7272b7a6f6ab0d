"""The strings of tokens.json: every script and the places where tokenisers go wrong.

Owns the list only; make_golden.py asks llama.cpp for the ids. Deterministic: the mixed strings come from a fixed seed.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

SPECIAL = (
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<file_sep>", "<jupyter_code>",
    "<empty_output>", "<bos>", "<eos>", "<pad>", "<unk>", "<start_of_turn>", "<end_of_turn>", "<unused0>",
    "<unused99>", "<mask>", "[multimodal]", "<start_of_image>", "<s>", "</s>", "[INST]", "<|eot_id|>",
    "<0x0A>", "<0x41>", "<|IM_START|>", "<| im_start |>", "<|im_start|",
)  # fmt: skip

SHORT = (
    "", " ", "  ", "   ", "    ", " " * 7, " " * 8, " " * 15, " " * 16, " " * 17, " " * 31, " " * 32,
    " " * 64, " " * 100, "\n", "\n\n", "\n\n\n", "\n" * 5, "\n" * 10, "\n" * 31, "\n" * 40, "\t", "\t\t",
    "\t" * 5, "\t" * 20, "\r", "\r\n", "\r\n\r\n", "\n\r", " \n", "\n ", " \n ", "\n \n", "\t\n", "\n\t",
    " \t ", "\t \t", "  \n\n  \n", "\x0b", "\x0c", "\x00", "a\x00b", "\x01\x02", "\x7f", "\x1b[0m", "\x85",
    "\u00a0", "\u00a0\u00a0", "\u2003", "\u2028", "\u2029", "\u3000", "\u200b", "\ufeff", "\ufeffa",
    "\u180e", "a", "A", " a", "a ", " a ", "  a", "a  ", "   a", "    a", "\na", "a\n", "\ta", "ab", "abc",
    "Hello", "hello", " Hello", "HELLO", "Hello world", "Hello  world", "Hello   world", "Hello\nworld",
    "Hello\r\nworld", "Hello, world!", "hello_world", "HelloWorld", "▁", "▁▁", "▁a", "a▁b", " ▁ ", "Ġ",
    "Ġhello", "Ċ", "ĉ", "Â", "â", "ð", "Ł", "ł", "0", "1", "9", "10", "12", "123", "1234", "12345",
    "1234567890", "00000000", "3.14", "-1", "+1", "1e10", "1,000", "1 000", "1_000", "0x1F", "0b101", "1st",
    "2nd", "x2", "2x", "v1.2.3", "50%", "$5", "£5", "€5", "¥5", "5€", "12:34", "2024-01-31", "1/2", "½",
    "²", "x²", "٣", "١٢٣", "४५६", "၁၂", "一二三", "Ⅳ", "①②③", "𝟘𝟙𝟚", "১২৩৪", "๑๒๓", "'", "\"", "''", "``",
    "'s", "'S", "it's", "IT'S", "don't", "I'm", "we'll", "they'd've", "it\u2019s", "'t", " 't", "'ll", "'x",
    "a'b'c", ".", "..", "...", "....", "…", "!", "!!", "!!!!!!!!", "?!", "?!?!", ",", ",,", ";", ":", "::",
    "-", "--", "---", "—", "–", "_", "__", "___init___", "=", "==", "===", "=" * 20, "*", "**", "***", "#",
    "##", "######", "/", "//", "\\", "\\\\", "\\n", "\\u0041", "|", "||", "&&", "@", "@@", "~", "~~~", "^",
    "<", ">", "<>", "</", "/>", "->", "=>", "<-", "(", ")", "()", "[]", "{}", "{{}}", "((()))", "[[",
    "http://example.org", "https://example.org/a/b?c=d&e=f#g", "user@example.org", "C:\\Users\\me",
    "/usr/local/bin", "a.b.c", "a-b-c",
)  # fmt: skip

UNICODE = (
    "é", "e\u0301", "\u0301", "\u0301\u0301", "a\u0301\u0302\u0303", "ñ", "n\u0303", "ü", "u\u0308", "Å",
    "A\u030a", "\u212b", "ß", "ẞ", "ﬁ", "ﬀ", "İ", "ı", "i̇", "Ω", "\u2126", "µ", "μ", "Ａ", "ａｂｃ",
    "１２３", "ｱｲｳ", "ㄱㄴㄷ", "한", "\u1112\u1161\u11ab", "한국어", "한국어 문장입니다.", "你", "你好",
    "你好，世界！", "中文 English 混排", "繁體中文", "简体中文", "龍龘𪚥", "𠮷", "\U00020000", "日本語",
    "ひらがな", "カタカナ", "漢字かな交じり文。", "が", "か\u3099", "ー", "々", "〆", "Привет",
    "Привет, мир!", "ПРИВЕТ", "Ґанок", "ё", "е\u0308", "Γειά σου", "Σς", "ΐ", "שלום", "שָׁלוֹם", "مرحبا",
    "مَرْحَبًا", "لا", "ﷺ", "اردو", "فارسی", "नमस्ते", "क्ष", "श्री", "हिन्दी में", "বাংলা", "ਪੰਜਾਬੀ",
    "ગુજરાતી", "தமிழ்", "తెలుగు", "ಕನ್ನಡ", "മലയാളം", "සිංහල", "ไทย", "ภาษาไทยไม่มีช่องว่าง", "ລາວ",
    "မြန်မာ", "ខ្មែរ", "བོད་ཡིག", "ქართული", "Հայերեն", "አማርኛ", "ᓀᐦᐃᔭᐍᐏᐣ", "ᚠᚢᚦᚨᚱᚲ", "Cherokee ᏣᎳᎩ", "ߒߞߏ",
    "ꦧꦱꦗꦮ", "𐌰𐌱𐌲", "𐎀𐎁", "𓀀𓀁", "𒀀", "Tiếng Việt", "Việt Nam", "tiê\u0301ng", "łódź", "žluťoučký", "Þórr",
    "œuvre", "Ǆ", "ŉ", "ǅ", "ⓐ", "™", "©", "№", "°C", "℃", "\u200d", "\u200c", "\u200e", "\u200f",
    "\u202eabc", "\u2066x\u2069", "\ufe0f", "a\ufe0f", "\ue000", "\uf8ff", "\ufffd", "\ufffe", "\uffff",
    "\U0010ffff", "\u0378", "∀x∈ℝ", "∑∏∫", "≤≥≠≈", "→←↑↓", "⇒", "┌─┐", "█▓▒░", "⠓⠑⠇", "♠♥♦♣", "♔", "𝕏",
    "𝓪𝓫𝓬", "𝐀", "👍", "👍🏽", "👍🏽👍🏿", "😀", "😀😀", "😀😀😀😀", " 😀", "😀 ", "😀a", "a😀", "❤", "❤️",
    "❤️‍🔥", "👨‍👩‍👧‍👦", "👩🏽‍💻", "🏳️‍🌈", "🏴‍☠️", "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "🇫🇷", "🇫", "🇫🇷🇩🇪", "1️⃣",
    "#️⃣", "*️⃣", "☺", "☺️", "🫠", "🪿", "🙂\u200d↔️", "🧑\u200d", "\u200d🧑", "🏽", "(╯°□°)╯︵ ┻━┻",
    "¯\\_(ツ)_/¯", "z̸̢̛a̵l̶g̷o̸", "\u0e33", "\u0f73", "\u0344", "\u1e9b\u0323", "\u09c7\u09be", "\u0d4a",
    "\u2f800", "\ufb1d", "\u0958",
)  # fmt: skip

LONG = (
    "a" * 100, "ab" * 64, "A" * 50, "0" * 50, "1" * 33, "9" * 64, "." * 64, "-" * 80, "=" * 100, "_" * 33,
    "*" * 40, "#" * 30, "!" * 50, "\\" * 20, "ha" * 30, "na " * 20, "哈" * 40, "あ" * 33, "é" * 40,
    "😀" * 17, "👨‍👩‍👧‍👦" * 5, "\u0301" * 20, "\u200b" * 10, "x " * 30, " x" * 30, "\n " * 15,
    " \n" * 15, "\r\n" * 12, "\t\n" * 9, "supercalifragilisticexpialidocious",
    "Donaudampfschifffahrtsgesellschaftskapitän", "pneumonoultramicroscopicsilicovolcanoconiosis",
    "thequickbrownfoxjumpsoverthelazydog", "ACGTACGTTAGCCGATTACAGATTACA" * 3,
    "d41d8cd98f00b204e9800998ecf8427e", "QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVo=",
    "def f(x):\n    return x + 1\n", "if (a && b) {\n\treturn c[i++];\n}\n",
    "for i in range(10):\n\n        print(i)\n", "{\"a\": [1, 2.5, null], \"b\": {\"c\": \"d\\n\"}}",
    "SELECT * FROM t WHERE a >= 1 AND b LIKE '%x%';", "<div class=\"a\">\n  <p>text&nbsp;</p>\n</div>",
    "\\begin{equation}\n\\alpha^2\n\\end{equation}", "x = lambda a, *b, **c: a if b else c",
    "#!/bin/sh\nset -eu\necho \"$1\" | sed 's/a/b/g'", "int main(void){return 0;}//c", "a,b,c\r\n1,2,3\r\n",
    "- [ ] todo\n- [x] done\n", "| a | b |\n|---|:-:|\n| 1 | 2 |\n", "    indented\n        more\n\tback",
    "trailing   \n  spaces  \n", "\n\nstart", "end\n\n", "mixed\r\nline\nends\rhere",
    "The price is $1,234.56 (excl. 19% VAT).",
    "Dr. Smith's e-mail: j.o'neil+test@ex-ample.co.uk, tel. +1 (555) 010-9999.",
    "What?! No way... \u201cReally\u201d \u2014 yes.",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n", "a<|im_end|>b", " <|im_end|> ",
    "<|im_end|>\n", "<|im_end|><|im_end|>", "\n<end_of_turn>\n", "<bos>Hello", "<bos> Hello", "a <eos> b",
    "<pad><pad>", "text<|endoftext|>more", "<<|im_end|>>", "<|im_<|im_end|>end|>",
    "日本語とEnglishと中文mixed混合123テスト。", "В 2024 году — 50% роста!", "السعر ١٢٫٥٠ دولار (USD)",
    "ราคา 1,500 บาท", "가격은 ₩15,000입니다.", "कीमत ₹1,00,000 है।",
)  # fmt: skip

_PIECES = (
    "the", " quick", "Straße", " 漢字", "かな", " привет", "😀", "👩🏽‍💻", "\n", "\n\n", "\t", " ", "  ",
    "    ", "123", " 4567", "3.14", "'s", "don't", "...", " --", "()", "{", "}", "\r\n", "\u00a0", "\u200b",
    "\u0301", "<|im_end|>", "<end_of_turn>", "ไทย", " مرحبا", "हिन्दी", "_x", "CamelCase", "\\n", "//", "=",
    "==", "\"", " “q”", "é", "ﬁ", "한국",
)  # fmt: skip


def strings(documents: Mapping[str, str]) -> list[str]:
    """All strings, no doubles, in a fixed order: the lists above, seeded mixtures of pieces, every document whole."""
    rng = random.Random(20260301)
    mixed = ["".join(rng.choice(_PIECES) for _ in range(rng.randint(2, 14))) for _ in range(120)]
    mixed += ["".join(chr(_any_character(rng)) for _ in range(rng.randint(1, 12))) for _ in range(60)]
    return list(dict.fromkeys([*SHORT, *SPECIAL, *UNICODE, *LONG, *mixed, *documents.values()]))


def _any_character(rng: random.Random) -> int:
    """A code point from anywhere in Unicode, surrogates excepted."""
    while True:
        code = rng.choice(
            (
                rng.randrange(0x20, 0x250),
                rng.randrange(0x250, 0x3000),
                rng.randrange(0x3000, 0x20000),
                rng.randrange(0x110000),
            )
        )
        if not 0xD800 <= code <= 0xDFFF:
            return code
