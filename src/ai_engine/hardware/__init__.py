"""Hardware: what the machine has, memory in arenas, a team of threads; see ports/hardware.py for the contracts."""
