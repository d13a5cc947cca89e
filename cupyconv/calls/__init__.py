"""From arguments to a call that can be planned and run: everything is checked here, nothing is launched.

One file an operation; ``call.py`` is what they share.
"""
