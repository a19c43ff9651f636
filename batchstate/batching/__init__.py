"""What a batch is made of: packed host rows, rows only the device knows, its door and its one upload."""
