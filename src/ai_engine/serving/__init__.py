"""The serving layer: who runs when. Implements ports.serving over ports.runtime; knows no text and no HTTP.

service.py    the port: checks, bounded queue, streams, health, drain (event loop side)
loop.py       the step loop's thread: arrivals, opening, a step, its chunks
scheduler.py  plan(): who runs how many tokens this step, pure
rules.py      admission and stop rules, lists of small functions
queue.py      the waiting line: priorities, fair shares per tenant
shares.py     fair shares of what runs: seats and prompts
cost.py       how long will a step take
lookup.py     guesses of the next tokens, from what was said before
watchdog.py   a step that does not end: told, and its requests failed
state.py      what the scheduler knows, and its invariants
config.py     every number and its default
"""
