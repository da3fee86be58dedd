"""Entry points for other engines: they replace an engine's FlashMLA functions by this library's."""
