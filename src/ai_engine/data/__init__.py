"""The data layer (L4): model files, tokenisers, chat templates, and the way from tokens back to text.

models.py      model names -> local files (packaged models, cache); hub.py: downloads from a model hub
gguf.py        GGUF reader; safetensors.py: reader of Hugging Face folders
shapes.py      which tensors an architecture needs, and their shapes
mapped.py      a weight file in memory; files.py: atomic writes, manifests, locks
tokenizer.py   text -> ids, ids -> bytes
template.py    messages -> prompt text; chat.py: messages -> ids
output.py      one choice's way from tokens to text, over detokenize.py (UTF-8) and stops.py (stop strings)
service.py     all of the text side as the doors use it
"""
