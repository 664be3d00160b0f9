"""`lockstep doctor`: would a run start on these machines? Looks, measures, and says what to do. torch in child processes alone."""
