"""Operations for other frameworks, in modules that their users import: ``interop.torch``, ``.jax``, ``.dask``, ``.onnx``."""
