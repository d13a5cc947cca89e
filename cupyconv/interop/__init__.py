"""Operations for other frameworks, each in a module that its users import: ``cupyconv.interop.torch``, ``.jax``, ``.dask``, ``.onnx``."""
