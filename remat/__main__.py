"""`python -m remat`: the command line."""

from remat.cli.commands import main

if __name__ == "__main__":
    main()
