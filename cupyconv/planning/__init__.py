"""Planning of operations that both backends have; on its way out."""
