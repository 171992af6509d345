"""`python -m train`, also under `accelerate launch -m`."""

from train.app import main

if __name__ == "__main__":
    main()
