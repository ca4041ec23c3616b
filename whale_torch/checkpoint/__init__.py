"""checkpoint: values from files and dicts that know nothing of ranks."""
