"""Many sites, many machines: the cells of a study, what does one, what hands them out, what is written."""
