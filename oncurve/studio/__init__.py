"""The web server that shows runs, groups and curves in a browser. It reads run folders and never trains."""
