"""run.db, the SQLite database of a run: schema, writer, reader."""
