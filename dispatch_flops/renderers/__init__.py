"""From a frozen ``Profile`` to text. Renderers return strings; they print and write nothing."""
