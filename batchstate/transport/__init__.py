"""How KV reaches another process: what is to be written, by whom, and when its memory is anybody's again."""
