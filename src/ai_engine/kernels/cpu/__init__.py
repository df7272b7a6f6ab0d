"""CPU kernels: Python that emits LLVM IR. Start at lang.py (the language), then matmul.py (the weight of the work)."""
