"""What lies in an output folder, and how it is taken up again."""
