"""Problems and plans: what to compute, and which steps compute it.  This package never reads array elements."""
