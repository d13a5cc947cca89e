"""Operations for other frameworks, one module per framework: ``interop.torch``, ``.jax``, ``.dask`` and ``.onnx``."""
