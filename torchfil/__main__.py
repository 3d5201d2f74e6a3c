"""``python -m torchfil``."""

from torchfil.cli import main

if __name__ == "__main__":
    main(prog_name="torchfil")
