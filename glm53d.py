"""Start glm53d from a checkout: python glm53d.py --config conf/h200x8.toml"""

# Nothing is imported outside the guard: each spawned rank runs this file again.
if __name__ == "__main__":
    import sys

    from glm53d.__main__ import main

    sys.exit(main())
