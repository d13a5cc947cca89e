"""Problems and plans: what is to be computed, and what will run.  No element of an array is looked at here."""
