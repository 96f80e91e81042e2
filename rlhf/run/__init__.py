"""One run around its loop: start, folder, sampling and grading, evaluation, what is logged."""
