"""What a run was, from the files in its folder: the readers, and a page that shows it."""
