"""Where bytes live: local files, object storage and the Hugging Face hub."""
