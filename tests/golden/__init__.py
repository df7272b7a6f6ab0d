"""Golden data and the independent references that the conformance tests compare the engine with.

Owns the reference forward, the small GGUF reader and writer, the tiny models and the committed goldens. Nothing here
imports the engine, except `engine.py`, the one adapter between the engine and these tests.
"""
