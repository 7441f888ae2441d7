"""Few rows on a CPU: through all layers in one call of compiled code, and products by the fastest way.

backend.py     CpuRows, a backend of drafting
few_rows.py    rows through a stack, and MTP layers that draft in turn (native/few_rows.cpp)
products.py    products of few rows, by whichever kernel is faster on this CPU
compiled.py    builds the code once for this CPU
threads.py     how many threads run it while other processes use the cores
"""
