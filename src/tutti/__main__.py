"""`python -m tutti` is `tutti`."""

from tutti.cli.main import main

if __name__ == "__main__":
    main()
