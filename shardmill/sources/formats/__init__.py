"""File formats: bytes to documents, with ranges that workers can share."""
