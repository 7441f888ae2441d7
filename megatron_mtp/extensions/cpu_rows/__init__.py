"""Few rows on a CPU: all layers in one call of compiled code, and matrix products by the fastest method.

backend.py     CpuRows, a decoding backend
few_rows.py    rows through a stack, and MTP layers that draft in sequence (native/few_rows.cpp)
products.py    products of few rows, by the fastest kernel on this CPU
compiled.py    builds the code once for this CPU
threads.py     number of threads while other processes use the cores
"""
