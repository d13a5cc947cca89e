"""``python -m tests.gpu_report --out DIR``: everything that only a GPU can show, within minutes, written as it comes.

===================  ==========================================================================================
`__main__.py`        the command: parts one after the other, each within its share of the time
`parts.py`           what each part starts
`processes.py`       processes side by side until a time, and lines of JSON that all of them add to one file
`environment.py`     the GPU, the driver, versions, the commit
`calls.py`           the table: for each kernel a call of the library that runs it
`smoke.py`           these calls beside NumPy, in every dtype
`compilation.py`     every kernel variant, compiled into CuPy's cache
`pytest_plugin.py`   the tests marked `gpu`, dealt to processes, each result written when it is known
`report.py`          the report: everything in one file, and in words
`status.py`          the pages' table of such reports
===================  ==========================================================================================

Every part runs in processes of its own: a fault in a kernel ends a CUDA context for good, and with it only what this
process had left to do.  Without a GPU the command runs from beginning to end all the same: the smoke on the host
device, what needs a GPU skipped, with the reason.
"""
