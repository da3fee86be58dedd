"""Preset configurations in the published ``config.json`` format; ``ModelConfig.from_preset(name)`` reads them."""
