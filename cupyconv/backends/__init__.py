"""Where plans are executed: one package per array library, with identical signatures."""
