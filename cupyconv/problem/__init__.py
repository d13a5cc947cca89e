"""Problems and plans, as ints and strings: what is to be computed, and what will run; no array is seen here."""
