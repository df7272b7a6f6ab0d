"""The runtime layer: a model file becomes a compiled program, and StepPlans become runs of it.

engine.py    Engine: the Runtime port; build phases, sequences, memory
step.py      one StepPlan into flat arrays, one run, tokens out - the hot path
kv.py        which sequence holds which KV page; prefix sharing, forks, eviction
weights.py   the file's tensors into one packed arena
ir.py        the graph: values, ops, printer, parser, verifier
models/      one short file of graph-building functions per architecture
passes.py    the compiler: valid graph in, valid graph out
lower.py     graph -> Calls with placed buffers and barriers
rope.py      tables of rotation angles
inspect.py   what a file needs, and the graph between passes, without loading it
"""
