"""A local page on which a person looks at the masks of runs and decides on each."""
