"""Messages, Protocols and errors that the seven layers exchange. Read this package first; it imports nothing of ours.

errors.py     the error tree: code, HTTP status, gRPC status, retryable
sampling.py   SamplingParams: what a client may ask of the sampler
serving.py    GenerateRequest -> stream of Chunk; the Serving port
streams.py    ChunkStream: what submit returns; unread chunks merge
runtime.py    StepPlan -> StepResult; the Runtime port, which owns KV pages
kernels.py    Call -> Program -> run; the Kernels port, which owns layouts
model.py      ModelConfig, TensorInfo; the ModelFile port (weights and metadata)
text.py       Encoded; the Tokenizer, ChatTemplate and TextService ports
telemetry.py  typed events; the Telemetry port
hardware.py   Machine; the Arena and ThreadTeam ports
clock.py      time as a port
progress.py   how far long work is
"""
