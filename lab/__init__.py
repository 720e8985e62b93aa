"""Programs that read measurements and compare them with models; not installed."""
