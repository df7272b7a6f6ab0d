"""The data layer (L4): model files, tokenisers, chat templates, and the way from tokens back to text.

shapes.py      which tensors an architecture needs, and their shapes
gguf.py        GGUF reader
safetensors.py Hugging Face directory reader
models.py      model names -> local files (packaged models, cache)
hub.py         downloads from a model hub
tokenizer.py   text -> ids, ids -> bytes
template.py    messages -> prompt text; chat.py: messages -> ids
detokenize.py  bytes -> text; stops.py: stop strings; output.py: one choice's path from tokens to text
"""
