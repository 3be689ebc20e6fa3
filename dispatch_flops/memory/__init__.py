"""Everything that follows the lifetime of storages; builds on ``counting``."""
