"""The functions of the package that cache their results: planning starts as in a new process once they are cleared."""

from __future__ import annotations

import sys


def clear_lru_caches() -> None:
    """Clear the ``lru_cache`` of every function in the modules of the package that are imported so far."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("cupyconv.")]
    for function in {each for module in modules for each in vars(module).values() if hasattr(each, "cache_clear")}:
        function.cache_clear()
