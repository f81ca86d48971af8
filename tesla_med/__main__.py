"""``python -m tesla_med``: the command line, where the ``tesla-med`` program is not on the path."""

from tesla_med.cli.app import main

if __name__ == "__main__":
    main()
