"""The recurrences, one a file: what a call means (prepare), its generic forms, and the public function."""
