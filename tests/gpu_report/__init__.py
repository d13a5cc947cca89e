"""``python -m tests.gpu_report --out DIR``: run what only a GPU can show, within minutes; write results as they come.

===================  ==========================================================================================
`__main__.py`        the command: runs the parts in turn, each within its share of the time
`parts.py`           the processes that each part starts
`processes.py`       runs processes in parallel until a deadline; the JSON lines that they append to one file
`environment.py`     the GPU, the driver, versions, the commit
`calls.py`           the table: for each kernel, a call of the library that runs it
`smoke.py`           compares these calls with NumPy, in every dtype
`compilation.py`     compiles every kernel variant into CuPy's cache
`pytest_plugin.py`   distributes the tests marked `gpu` to processes, and writes each result at once
`report.py`          the report: everything in one file, and as text
`status.py`          the pages' table of such reports
===================  ==========================================================================================

Every part runs in its own processes.  A fault in a kernel ends a CUDA context for good; then only the remaining work
of that process is lost.  Without a GPU the command still runs from beginning to end: the smoke calls run on the host
device, and parts that need a GPU are skipped, with the reason.
"""
