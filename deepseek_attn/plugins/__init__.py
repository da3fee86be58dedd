"""What other engines load to compute attention by this library: entry points that replace their FlashMLA functions."""
