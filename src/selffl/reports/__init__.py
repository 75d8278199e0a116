"""Tables, figures, pages and the records they are made from."""
