"""The doors: OpenAI-compatible REST with server-sent events, health and metrics. Imports ports and contracts only.

app.py           Api: the ASGI application; routes, keys, CORS, errors in one shape, drain
http.py          Exchange: one request and its response; bodies with limits, disconnects, ids
openai_types.py  which fields a request may have, and what they turn into
generation.py    prompts x choices running in serving, their text, stops and usage
replies.py       JSON that goes back: answers, log probabilities, usage, errors
rest.py          what each route does
stream.py        server-sent events: order, pings, endings
"""
