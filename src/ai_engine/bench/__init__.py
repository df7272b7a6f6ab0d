"""What `ai-engine bench machine|kernels|model|serve|compare` does: an application on top of the layers.

    options.py     words and options of the command (light: the command line imports it)
    stats.py       percentiles, bootstrap intervals, arrivals      svg.py      plots      report.py  tables and JSON
    host.py        the machine's identity, steal and foreign CPU while something is measured
    ceilings.py    `machine`: read bandwidth, multiply-adds, int8 dots; stored by hardware/ceilings.py
    kernels.py     `kernels`: single operations through the kernels port
    engine.py      `model`: steps of a loaded model in this process
    client.py      one streamed request over HTTP       load.py      many: closed loop, open loop
    workloads.py   S1 to S8                             serve.py     `serve`: workloads against a server
    llamacpp.py    llama.cpp's binaries                 compare.py   `compare`: A B A B beside them
    versus.py      the rounds of two servers            null_server.py  what the client itself costs

It reads ports and public functions of the layers and what app.py wires. Nothing below imports it.
"""
