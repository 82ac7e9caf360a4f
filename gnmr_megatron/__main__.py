"""`python -m gnmr_megatron`, as torchrun starts it."""

from gnmr_megatron.cli.main import main

if __name__ == "__main__":  # saving a checkpoint starts a process that imports this module again
    raise SystemExit(main())
