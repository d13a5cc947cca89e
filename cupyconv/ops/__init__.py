"""Operations: a file for each, with its signature, its docstring, and the checks that make a problem of arguments."""
