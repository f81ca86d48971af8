"""Reports: what a run writes for people, one module each, chosen by the pipeline's ``reports``."""
