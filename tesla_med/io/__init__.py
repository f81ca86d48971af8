"""Files: the only importers of nibabel, SimpleITK and pydicom. Nothing is imported until it is used."""
